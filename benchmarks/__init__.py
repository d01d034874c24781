"""What `make bench` measures, and against what. Each side runs the same load in the same process, interleaved."""
