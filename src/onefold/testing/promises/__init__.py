"""The promises of a store, by subject. `onefold.testing.StoreContract` combines them."""
