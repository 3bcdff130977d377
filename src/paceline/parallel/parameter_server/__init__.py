"""Parameter server."""
