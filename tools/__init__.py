"""Small tools that every room uses: files of a run, JSON with a schema, clocks, checksums."""
