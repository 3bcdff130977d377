"""The fork server of the launcher, and of a rank for its loader processes."""
