"""What happens with the model when a run is done."""
