"""Lets Keras have the backend that the command names first, where a program imports it at its top."""

import os
import sys

os.environ["KERAS_BACKEND"] = sys.argv[1]
