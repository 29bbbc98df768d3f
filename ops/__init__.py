"""Operations twice: in torch, and as a Triton kernel. Below the model; nothing here knows of ranks."""
