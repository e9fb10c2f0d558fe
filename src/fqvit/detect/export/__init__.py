"""Export a detector: its networks in the form of export/, and the integer arithmetic between them as code or test vectors."""
