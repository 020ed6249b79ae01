"""What a run shows and leaves: lines for people, files for programs, pictures."""
