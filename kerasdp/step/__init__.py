"""The training step: what it computes, from the rows of a batch to the update, and its check."""
