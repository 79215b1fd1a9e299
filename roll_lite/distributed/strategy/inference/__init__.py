"""What the real inference engines have in common, whatever their make."""
