"""Plan and Timeline in, text, traces and pictures out."""
