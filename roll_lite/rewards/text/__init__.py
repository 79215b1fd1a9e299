"""Rewards that read the response's text: the option chosen, the text itself, instructions followed, its format."""
