"""Data parallelism as in DataParallel: threads of one process drive several devices (`dp`)."""
