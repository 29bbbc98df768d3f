"""The models that have a name: python train.py gpt2. Each is the values of its flags that are no defaults."""
GPT2 = dict(norm="layer", mlp="gelu", pos="learned", bias=True, tied=True, dropout=0.0)
LLAMA = dict(norm="rms", mlp="swiglu", pos="rope", bias=False, tied=False, dropout=0.0)
LARGE = dict(dtype="bf16", log_every=10, eval_every=500, save_every=1000)
GPT2_SMALL = dict(GPT2, n_layer=12, n_head=12, n_kv_head=12, n_embd=768, ffn_hidden=3072, seq_len=1024,
                  lr=6e-4, compile=True, **LARGE)
LARGE_LLAMA = dict(LLAMA, seq_len=2048, steps=20_000, compile=True, **LARGE)
DENSE_210M = dict(LARGE_LLAMA, n_layer=24, n_head=4, n_kv_head=1, n_embd=512, ffn_hidden=1792,
                  rope_base=100000.0, vocab_size=128256, micro_batch=8, lr=1e-3, warmup=200)
# Of github.com/karpathy/nanochat. Its norms have no weights, it also norms the embedding, and it norms
# queries and keys after they turn. Some of its weights start at zero, and its optimizer is Muon.
NANOCHAT = dict(LARGE_LLAMA, qk_norm="head", mlp="relu2", logit_softcap=15.0, lr=5e-4, warmup=500)
# d24 and d26 as in January 2026: three of four layers see half of the context. Left out are the value
# embeddings of every second layer, a sum with the embedding before each layer, and the learned factors of
# both. The last layer of their d26 sees all keys, too.
NANOCHAT_2026 = dict(NANOCHAT, vocab_size=32768, window=1025, full_every=4, micro_batch=16)
QWEN3 = dict(LARGE_LLAMA, head_dim=128, qk_norm="head", norm_eps=1e-6, vocab_size=151936,
             rope_base=1000000.0, warmup=2000)
PRESETS = {
    "tiny": dict(), "tiny-moe": dict(n_experts=8, top_k=2),
    "shakespeare-char": dict(GPT2, n_layer=6, n_head=6, n_kv_head=6, n_embd=384, ffn_hidden=1536, seq_len=256,
                             bias=False, dropout=0.2, micro_batch=64, steps=5000, lr=1e-3, min_lr=1e-4,
                             muon_lr_factor=3.0, warmup=100, beta2=0.99, compile=True, dtype="bf16",
                             log_every=10, eval_every=250, eval_iters=20, save_every=1000),
    "wordplay": dict(GPT2_SMALL, bias=False, micro_batch=64, steps=2000, warmup=100),
    "gpt2": dict(GPT2_SMALL, micro_batch=32, global_batch=480, steps=100_000, warmup=2000),
    "dense-210m": dict(DENSE_210M, muon_lr_factor=2.0),
    "moe-4b": dict(DENSE_210M, n_experts=64, top_k=1),
    "smol-1.7b": dict(LARGE_LLAMA, n_layer=24, n_head=32, n_kv_head=32, n_embd=2048, ffn_hidden=8192,
                      vocab_size=49152, micro_batch=4, lr=5e-4, warmup=500),
    "bert-345m": dict(GPT2, objective="mlm", n_layer=24, n_head=16, n_kv_head=16, n_embd=1024,
                      ffn_hidden=4096, seq_len=512, vocab_size=30592, micro_batch=64, steps=100_000, lr=1e-4,
                      min_lr=1e-5, warmup=1000, weight_decay=0.01, beta2=0.999, compile=True, **LARGE),
    "llama-7b": dict(LARGE_LLAMA, n_layer=32, n_head=32, n_kv_head=32, n_embd=4096, ffn_hidden=11008,
                     vocab_size=32000, micro_batch=1, lr=3e-4, warmup=2000),
    "llama-3.2-1b": dict(LARGE_LLAMA, n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, ffn_hidden=8192,
                         vocab_size=128256, tied=True, rope_base=500000.0,
                         rope_scaling=(32.0, 1.0, 4.0, 8192.0), micro_batch=4, lr=3e-4, warmup=2000),
    "qwen3-0.6b": dict(QWEN3, n_layer=28, n_head=16, n_kv_head=8, n_embd=1024, ffn_hidden=3072, tied=True,
                       micro_batch=4, lr=3e-4),
    "qwen3-30b-a3b": dict(QWEN3, n_layer=48, n_head=32, n_kv_head=4, n_embd=2048, ffn_hidden=768,
                          n_experts=128, top_k=8, router="softmax-topk", aux_coef=1e-3, micro_batch=1,
                          lr=3e-4),
    "olmo-2-1b": dict(LARGE_LLAMA, n_layer=16, n_head=16, n_kv_head=16, n_embd=2048, ffn_hidden=8192,
                      vocab_size=100352, qk_norm="all", norm_place="after", norm_eps=1e-6, rope_base=500000.0,
                      micro_batch=4, lr=4e-4, warmup=2000),
    "gemma-3-1b": dict(LARGE_LLAMA, n_layer=26, n_head=4, n_kv_head=1, n_embd=1152, head_dim=256,
                       ffn_hidden=6912, vocab_size=262144, tied=True, norm="rms1p", norm_place="both",
                       qk_norm="head", mlp="geglu", norm_eps=1e-6, rope_base=1000000.0, window=512,
                       full_every=6, window_rope_base=10000.0, embed_scale=True, micro_batch=4, lr=3e-4,
                       warmup=2000),
    # d20 as in October 2025
    "nanochat-d20": dict(NANOCHAT, n_layer=20, n_head=10, n_kv_head=10, n_embd=1280, ffn_hidden=5120,
                         vocab_size=65536, micro_batch=32),
    "nanochat-d24": dict(NANOCHAT_2026, n_layer=24, n_head=12, n_kv_head=12, n_embd=1536, ffn_hidden=6144),
    "nanochat-d26": dict(NANOCHAT_2026, n_layer=26, n_head=13, n_kv_head=13, n_embd=1664, ffn_hidden=6656),
    # github.com/KellerJordan/modded-nanogpt, the record of 19 November 2024. Left out are the skip
    # connections between layers and from the embedding, the first layer's values in the other layers, and
    # what is left out of nanochat-d20. Its documents do not see each other: give --doc-mask on if the data
    # has documents.
    "modded-nanogpt": dict(LARGE_LLAMA, n_layer=12, n_head=6, n_kv_head=6, n_embd=768, ffn_hidden=3072,
                           seq_len=65536, vocab_size=50304, qk_norm="head", mlp="relu2", logit_softcap=30.0,
                           window=1024, micro_batch=1, lr=1e-3, warmup=200),
    "bloom-176b": dict(GPT2, n_layer=70, n_head=112, n_kv_head=112, n_embd=14336, ffn_hidden=57344,
                       seq_len=2048, vocab_size=250880, micro_batch=2, global_batch=2048, steps=100_000,
                       lr=6e-5, warmup=375, **LARGE),
}
