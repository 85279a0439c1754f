"""What tests share: databases, doubles, transports and a proxy in front of a database."""
