"""The contract with other programs: JSON Schemas, an AsyncAPI document, and the changes since a release."""
