"""Write run files, and turn text and conversations into shards."""
