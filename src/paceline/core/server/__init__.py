"""What the servers of Paceline share: the panel (`paceline ui`) and `paceline serve`."""
