"""Pure maths: tensors and settings in, tensors out. No Ray, no batch class; masked entries never contribute."""
