"""anybatch's algorithms under the interfaces of other libraries; each module needs the extra of the same name."""
