"""Operations twice: in torch, and as a Triton kernel. Below the model; no collective is called here."""
