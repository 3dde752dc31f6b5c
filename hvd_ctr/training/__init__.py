"""Training: the one train step, HybridModel for Keras' fit, the loop of the command line, metrics and checkpoints."""
