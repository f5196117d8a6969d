"""What every server of sfumato is held to: connections, requests and JSON that a stranger may send."""
