use crate::print::snapshot::Snapshot;
use crate::print::template::{fill, heading, lines, why_no_option};

pub(super) fn text(snapshot: &Snapshot) -> String {
    let sources = if snapshot.binds() { snapshot.sources.as_slice() } else { &[] };
    let (constant, option) = match why_no_option(snapshot.option) {
        Some(reason) => (String::new(), format!("        // {reason}\n")),
        None => (CONSTANT.to_owned(), OPTION.to_owned()),
    };
    let import =
        if constant.is_empty() { "" } else { "import io.netty.channel.unix.IntegerUnixChannelOption;\n" };
    fill(
        TEMPLATE,
        &[
            ("heading", &heading(snapshot, "//")),
            ("destination", &snapshot.destination().to_string()),
            ("note", snapshot.example_note()),
            ("import", import),
            ("sources", &lines(sources, |_, source| format!("        \"{source}\","))),
            ("constant", &constant),
            ("option", &option),
        ],
    )
}

const CONSTANT: &str = "
    // IP_LOCAL_PORT_RANGE: level SOL_IP, option 51.
    private static final IntegerUnixChannelOption LOCAL_PORT_RANGE =
        new IntegerUnixChannelOption(\"IP_LOCAL_PORT_RANGE\", 0, 51);
";

const OPTION: &str = "        // 0xFFFF0000: the whole range, searched port by port instead of by parity, so that the search stays short beyond half.
        bootstrap.option(LOCAL_PORT_RANGE, 0xFFFF0000);
";

const TEMPLATE: &str = r#"// Netty, source ports toward @destination@@note@. Needs netty-transport-native-epoll for Linux.
@heading@import io.netty.bootstrap.Bootstrap;
import io.netty.channel.ChannelFuture;
import io.netty.channel.epoll.EpollChannelOption;
import io.netty.channel.epoll.EpollSocketChannel;
@import@import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.util.concurrent.atomic.AtomicInteger;

public final class SourcePorts {
    // Source addresses of this host, used in turn; each has its own ports. None: the kernel chooses the address.
    private static final String[] SOURCES = {
@sources@    };
@constant@
    private static final AtomicInteger TURN = new AtomicInteger();

    private SourcePorts() {}

    /** Sets the options. The group of the bootstrap must be an EpollEventLoopGroup: NIO has no such options. */
    public static Bootstrap configure(Bootstrap bootstrap) {
        bootstrap.channel(EpollSocketChannel.class);
        // connect() chooses the port, not bind(), so that destinations share ports.
        bootstrap.option(EpollChannelOption.IP_BIND_ADDRESS_NO_PORT, true);
@option@        return bootstrap;
    }

    /** Connects from the next source address. */
    public static ChannelFuture connect(Bootstrap bootstrap, SocketAddress remote) {
        if (SOURCES.length == 0) {
            return bootstrap.connect(remote);
        }
        String source = SOURCES[Math.floorMod(TURN.getAndIncrement(), SOURCES.length)];
        return bootstrap.connect(remote, new InetSocketAddress(source, 0));
    }
}

// What Netty cannot do: these options with NioSocketChannel or the channels of the JDK. Netty logs an option that a channel does not have
// and goes on without it. `fourtuple fix ports` needs no change of the program.
"#;
