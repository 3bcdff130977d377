"""The progress of a rank, and the times of its steps on the device."""
