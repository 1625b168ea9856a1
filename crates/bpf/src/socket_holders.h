/* The layout is repeated in socket_holders.rs. */
#pragma once
#include "kernel.h"

/* A descriptor of a socket. */
struct holder {
	u32 inode;
	u32 process;
	u16 port;
	/* Protocol of a socket without a peer, otherwise 0. */
	u8 protocol;
	u8 state;
	u16 family;
	u16 hole;
	u32 address[4];
};
