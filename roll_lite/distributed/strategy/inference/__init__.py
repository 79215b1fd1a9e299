"""Code that all inference engines share."""
