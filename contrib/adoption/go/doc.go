// Package adoption tests a real gRPC client over the dialer of bindings/go.
package adoption
