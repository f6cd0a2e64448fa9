"""What the endpoint engine is made of: each module is one concern, free of sockets and threads where it can be."""
