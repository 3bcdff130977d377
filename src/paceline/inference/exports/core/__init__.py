"""What all forms of exports share: their interface, and the proof that an export answers as the
trained model."""
