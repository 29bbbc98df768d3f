"""Text, archives, tokenizers, token files, and the order of samples."""
