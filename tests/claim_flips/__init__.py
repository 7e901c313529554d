"""What breaks each claim: arguments with which its check must come to another verdict."""
