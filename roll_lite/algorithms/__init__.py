"""Pure maths on tensors and settings; masked entries never contribute."""
