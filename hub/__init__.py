"""Models of others, in and out: Hugging Face, GGUF, peft."""
