"""What people see: tables generated from the data."""
