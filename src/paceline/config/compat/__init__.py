"""Keys and values of other training tools, read as Paceline's."""
