"""Times that are measured on the device."""
