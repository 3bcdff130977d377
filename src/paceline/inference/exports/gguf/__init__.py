"""GGUF files, which llama.cpp and Ollama read: written from a model's folder, and opened again."""
