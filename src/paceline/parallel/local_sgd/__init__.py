"""Local SGD and DiLoCo."""
