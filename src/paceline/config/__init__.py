"""The config: schema, loading, the keys of other tools, derived values. Never imports torch."""
