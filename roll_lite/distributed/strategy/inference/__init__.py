"""Code that all inference engines share, whatever their make."""
