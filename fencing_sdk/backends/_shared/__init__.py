"""What backends of several stores share."""
