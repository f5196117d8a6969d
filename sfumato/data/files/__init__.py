"""Files of rows as they come from anywhere, mixed, read in blocks, streamed, and kept in stores."""
