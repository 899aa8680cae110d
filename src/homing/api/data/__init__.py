"""New run files, and text and chats turned into shards."""
