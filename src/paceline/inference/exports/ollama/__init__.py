"""Exports for Ollama: a GGUF file, and a Modelfile with the chat template in Go's language."""
