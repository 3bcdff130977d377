"""Classifiers of images and of texts."""
