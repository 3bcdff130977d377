"""LoRA and its variants, and quantization of the frozen weights."""
