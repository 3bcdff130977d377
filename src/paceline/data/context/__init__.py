"""The division of packed rows among the ranks of a context group."""
