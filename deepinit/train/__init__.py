"""Pre-training: config, data, optimizer, step, checkpoints and the loop that ties them. Nothing is imported here."""
