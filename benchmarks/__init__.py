"""What `make bench` measures, and against what. Each side runs the same load in the same process, interleaved."""

import muxtune  # noqa: F401  (before torch: it prepares the environment)
