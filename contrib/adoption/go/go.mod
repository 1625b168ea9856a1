// A real gRPC client over the dialer of bindings/go: docs/adoption.md. A module of its own, so that the bindings need no other module.
module fourtuple.example/fourtuple/adoption

go 1.26.0

require (
	fourtuple.example/fourtuple v0.0.0
	google.golang.org/grpc v1.85.0
)

require (
	golang.org/x/net v0.60.0 // indirect
	golang.org/x/sys v0.48.0 // indirect
	golang.org/x/text v0.42.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260817212433-ac3dfec99bb1 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)

replace fourtuple.example/fourtuple => ../../../bindings/go
