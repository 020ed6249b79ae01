"""TensorFlow: one process drives all devices."""
