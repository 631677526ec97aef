"""The HTTP server: models in the APIs of OpenAI, Anthropic and Ollama."""
