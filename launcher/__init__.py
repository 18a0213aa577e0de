"""What runs before and beside the server; imports neither torch nor SGLang."""
