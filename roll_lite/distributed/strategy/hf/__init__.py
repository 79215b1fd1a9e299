"""Forward passes on Hugging Face transformers. Importing this package does not import transformers; the strategy is in `strategy`."""
